"""From prompts and chats to token ids and loss masks; packing; stores of target outputs on disk."""
