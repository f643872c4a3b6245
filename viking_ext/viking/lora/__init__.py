"""The branch of a LoRA, computed before its Linear and added to the output in place; see viking.lora.fusing."""
