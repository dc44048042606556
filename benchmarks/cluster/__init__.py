# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench cluster`: prompts computed here and answered there."""
