"""Ready-made tasks: language models, image classifiers, and models of Hugging Face transformers."""
