# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds this site: ``make docs``. Nothing is fetched, warnings are errors."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package, the tests that pages count, and our extensions

import hyper_parallel  # noqa: E402

project = "hyper_parallel"
author = "the hyper_parallel authors"
release = version = hyper_parallel.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.extensions.mathml",
    "docs.extensions.failure_table",
    "docs.extensions.design_notes",
    "docs.extensions.repository_files",
]
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpicky = True
# What other libraries document; their inventories would have to be fetched.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|typing|typing_extensions|pathlib|os)\..*"),
    ("py:class", r".*\._ParamT"),
    ("py:class", r"(Tensor|DeviceMesh|DTensor|Optimizer|Module|nn\.Module|dtype|Path)"),
]

html_theme = "furo"
html_title = "hyper_parallel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
html_domain_indices = False
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#2f5d8a", "color-brand-content": "#2f5d8a"},
    "dark_css_variables": {"color-brand-primary": "#8ab4dc", "color-brand-content": "#8ab4dc"},
}
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
