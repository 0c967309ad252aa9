from xml.etree import ElementTree

from hfpatch.support.markup import html_table


def test_text_is_escaped_and_numbers_are_readable():
    made = html_table("<b>", ["a", "b"], [["<script>", 1234567], [None, 0.123456]], ["x & y"])
    table, note = ElementTree.fromstring(f"<div>{made}</div>")
    assert [cell.text for cell in table.iter("td")] == ["<script>", "1,234,567", None, "0.1235"]
    assert (table.find("caption").text, note.text) == ("<b>", "x & y")
    assert "right" in table.findall(".//td")[1].get("style")
