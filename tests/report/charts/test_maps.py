"""Charts of the plane."""

from nuclr.report.charts.maps import colored_points, value_map


def test_points_have_the_color_of_their_group():
    chart = colored_points("t", [("a<", 1, [(0.0, 0.0)]), ("b", 2, [(1.0, 1.0), (0.5, 0.5)])], (-1, 1), (0, 1))
    assert chart.svg.count("<circle") == 3 and "a&lt;" in chart.svg and "a<" not in chart.svg
    assert [key.name for key in chart.legend] == ["a<", "b"]


def test_the_largest_value_has_the_strongest_color_and_the_first_row_is_at_the_bottom():
    svg = value_map("t", [[0.0, 1.0], [2.0, 4.0]], 0.0, 4.0, points=[(0.5, 0.5)]).svg
    cells = [part.split("/>")[0] for part in svg.split("<rect ")[1:]]
    assert [cell.split("--v:")[1].rstrip('"') for cell in cells] == ["0.00", "0.25", "0.50", "1.00"]
    tops = [float(cell.split('y="')[1].split('"')[0]) for cell in cells]
    assert tops[0] == tops[1] > tops[2] == tops[3]
    assert "values from 0 to 4" in svg


def test_a_constant_map_is_drawn():
    assert value_map("t", [[1.0]], 1.0, 1.0).svg.count("<rect") == 1
