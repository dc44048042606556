# SPDX-License-Identifier: Apache-2.0
"""Pictures of clients: fetched, decoded under limits, and made into what a model reads."""
