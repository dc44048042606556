# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the process that renders them, its sandbox, and what they are found to show."""
