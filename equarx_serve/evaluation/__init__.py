"""What a cheaper collective does to the model's answers.

divergence   KL, top-1 agreement and perplexity of one run against another
"""
