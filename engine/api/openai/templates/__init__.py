# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the processes and the sandbox that render templates, and tests of a template."""
