"""Runs code in a notebook of one cell, and prints its outputs as JSON: [[type, stream or "", text], ...]."""

import json
import sys

import nbformat
from nbclient import NotebookClient

with open(sys.argv[1]) as file:
    cell = nbformat.v4.new_code_cell(file.read())
NotebookClient(nbformat.v4.new_notebook(cells=[cell]), timeout=250, kernel_name="python3", allow_errors=True).execute()
outputs = [[o.output_type, o.get("name", ""), o.get("text") or str(o.get("data") or o)] for o in cell.outputs]
print(json.dumps(outputs))
