"""What several screens use: sessions, generation jobs, texts, templates, theme."""
