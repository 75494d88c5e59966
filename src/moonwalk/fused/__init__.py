"""`fused_update`: gradients are applied as they are computed."""
