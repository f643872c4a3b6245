"""What the tests share: small models, LoRA in the styles in use, training that returns what it computed."""
