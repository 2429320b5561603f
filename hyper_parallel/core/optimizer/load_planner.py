# SPDX-License-Identifier: Apache-2.0
"""Reading a distributed checkpoint that an older version of the optimizer wrote."""

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from typing_extensions import override


class OlderCheckpointPlanner(DefaultLoadPlanner):
    """Loads a checkpoint that does not have all settings of this optimizer's groups.

    torch's own planner wants every key, or with ``allow_partial_load`` none, and then a momentum
    that is missing stays at zero without a word. This one lets the settings in ``param_groups`` be
    as they are here, and insists on all else::

        dcp.load(state, checkpoint_id=folder, planner=OlderCheckpointPlanner())
    """

    @override
    def create_local_plan(self) -> LoadPlan:
        """Which parts of which files this rank reads.

        Returns:
            The plan, without the settings that the checkpoint does not have.

        Raises:
            ValueError: If anything else is missing; all of it is named.
        """
        assert self.metadata is not None
        missing = [key for key in self.state_dict if key not in self.metadata.state_dict_metadata]
        needed = [key for key in missing if "param_groups." not in key]
        if needed:
            raise ValueError(
                f"the checkpoint has no {', '.join(needed)}; leave it out of what is loaded, or "
                "load the optimizer's state as it was saved and pass it through import_state, "
                "which starts new parameters at zero"
            )
        self.allow_partial_load = bool(missing)
        return super().create_local_plan()
