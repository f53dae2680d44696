"""Files of OpenAI Batch lines, run through the queue: `stoker batch`. No part of the library's API.

A line's way: input_file.py -> lines.py, fields.py (what it asks for) -> sent_lines.py (into Redis, once) -> a worker ->
collecting.py (its end) -> answers.py -> output_file.py, and only then out of Redis.
"""
