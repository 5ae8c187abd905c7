"""Tables as papers print them: rows are trained models, columns are test sets, cells are means over seeds."""
