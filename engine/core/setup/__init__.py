# SPDX-License-Identifier: Apache-2.0
"""What is checked, chosen and measured before an engine's first step."""
