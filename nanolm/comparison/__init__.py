"""Compare the models of the lectures on the same data, to show what each idea is worth."""
