"""What happens to weights between two steps: how a trainer's optimizer updates them."""
