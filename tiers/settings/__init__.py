# SPDX-License-Identifier: Apache-2.0
"""How settings are read: values, units, files and error messages. Knows no option by name."""
