TITLE = "The time of a vijp beside its vjp"
