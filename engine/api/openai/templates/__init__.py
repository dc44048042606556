# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the process that renders them, its sandbox, and the probe of a template."""
