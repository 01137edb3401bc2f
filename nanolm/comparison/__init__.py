"""The lectures' models side by side on the same data: what each idea is worth."""
