"""Charts as inline SVG: functions from numbers to markup."""
