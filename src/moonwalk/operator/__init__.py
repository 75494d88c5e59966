"""The operator itself: `vijp`, rules of one's own (`custom_vijp`), and their tests."""
