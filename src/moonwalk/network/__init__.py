"""From a flat jaxpr to a network: prologues of weights and of data, and nodes. A loop owns a network."""
