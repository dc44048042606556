# SPDX-License-Identifier: Apache-2.0
"""`stratakv plan`: how memory is divided, which rates decide, and the table that shows it."""
