"""From a flat jaxpr to a network: prologues for weights and data, and nodes. A loop owns a network."""
