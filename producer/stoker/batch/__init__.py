"""`stoker batch`: runs files of OpenAI Batch lines through the queue. Not part of the library's API.

The path of a line: json_lines.py, input_file.py and api/ (its request) -> feeding.py and record.py (into Redis, once)
-> a worker -> collecting.py (its end) -> output_file.py -> record.py (out of Redis).
"""
