"""`stoker dashboard`: rq-dashboard, started on one address and repaired in this process. Not part of the library's API.

`command.py` is the command, `server.py` builds the application and owns the socket, `pages.py` has stoker's own pages,
and `repairs.py` repairs rq-dashboard; each repair's docstring names the fault and the releases that have it. Nothing in
site-packages is changed.
"""
