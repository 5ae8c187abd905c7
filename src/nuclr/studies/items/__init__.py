"""Reports on items: which ones too many queries find (`hubness`), and which ones are popular or rare (`popularity`)."""
