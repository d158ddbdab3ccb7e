"""Conversations: messages, chat templates, tools, and parsers of answers with thoughts and tool calls."""
