"""`stoker batch`: runs files of OpenAI Batch lines through the queue. Not part of the library's API.

The path of a line: input_file.py -> lines.py and fields.py (its request) -> sent_lines.py (into Redis, once) -> a
worker -> collecting.py and ends.py (its end) -> answers.py -> output_file.py -> sent_lines.py (out of Redis).
"""
