"""Where documents come from: files, the Hugging Face hub, the built-in corpus."""
