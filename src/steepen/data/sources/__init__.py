"""Where documents come from: files, the Hugging Face Hub, the built-in corpus, or a user-defined function."""
