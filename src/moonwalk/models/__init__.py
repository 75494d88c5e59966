"""Networks made of `moonwalk.nn`: a batch [batch, *in_shape] to logits [batch, classes]."""

from .residual import residual_cnn as residual_cnn
