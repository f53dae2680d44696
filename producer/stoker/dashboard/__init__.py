"""`stoker dashboard`: rq-dashboard, started on one address and repaired in this process. Not part of the library's API.

`command.py` is the command, `server.py` owns the socket, `app.py` builds the Flask application. Each of the other files
repairs one part of rq-dashboard; each repair's docstring names the fault, and the first release that has it. Nothing in
site-packages is changed.
"""
