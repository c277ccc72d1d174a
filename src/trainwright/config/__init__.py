"""What a user asks for: the arguments, their older names, the rules between them, and where the run finds itself."""
