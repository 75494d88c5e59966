TITLE = "Table 1: how memory and time grow"
