"""The operator itself: `vijp`, custom rules (`custom_vijp`), and checks of both."""
