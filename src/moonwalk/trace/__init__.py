"""From a function to a flat jaxpr: declarations, what carries a derivative, which equations belong."""
