"""From a function to a flat jaxpr and its blocks: declarations, active variables, equal blocks."""
