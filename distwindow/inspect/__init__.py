"""Reading what a store holds, for all keys of a prefix, as the commands of `cli/` show it. Nothing
here prints, and nothing needs typer or rich, so that web applications can stand on it, too.

`servers` connects; `selection` says for which keys; `scan` finds their names. What these hold is
read by `windows`, `slots`, `pauses`, `breakers` and `minute`, each for one kind, and has one form
for JSON, in `json_form`. `ranking` says which keys come first, and `query` joins all of it: one
scan, and its findings page by page. `reset` deletes what a scan has found.
"""
