"""Networks made of `moonwalk.nn`: a batch [batch, *in_shape] to logits [batch, classes]."""

from .isometric import isometric_cnn as isometric_cnn
from .isometric import isometric_mlp as isometric_mlp
from .pyramid import pyramid_cnn as pyramid_cnn
from .residual import residual_cnn as residual_cnn
from .signal import conv1d_cnn as conv1d_cnn
