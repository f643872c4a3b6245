"""How torch modules reach the engine: which of them are streamed, and what stands in for their forward."""
