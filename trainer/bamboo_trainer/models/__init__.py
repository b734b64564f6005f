"""Ready-made tasks: language models, an MLP for two spirals, and models of Hugging Face transformers."""
