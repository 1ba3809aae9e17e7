"""Tokenization: Hugging Face tokenizers, chat templates, the byte-level tokenizer."""
