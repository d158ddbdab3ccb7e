"""What is particular to conversations: messages, tools, and what a model's answer says beyond its words."""
