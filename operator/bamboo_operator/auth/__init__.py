"""Who is let in: the workers' port and its check of pods' tokens, the check of a page's readers, the certificate."""
