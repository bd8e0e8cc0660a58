"""Shell blocks are read from a page as they are written there."""

import pytest

from diloco_testing.shell_blocks import Place, shell_blocks

PAGE = """
# Title

```sh
one
# not a heading
```

## Below

```yaml
a: 1
```

1. A list:

   ```sh
   two \\
     three
   ```
   ```sh
   four
   ```
"""


def test_a_block_has_the_heading_above_it_and_its_number_there():
    assert shell_blocks(PAGE) == {
        Place("Title", 1): "one\n# not a heading\n",
        Place("Below", 1): "two \\\n  three\n",
        Place("Below", 2): "four\n",
    }


def test_a_block_without_an_end_is_an_error():
    with pytest.raises(ValueError, match="Title"):
        shell_blocks("# Title\n```sh\none\n")
