"""Language models: an engine steps all its sequences together, and says which token each of them got."""
