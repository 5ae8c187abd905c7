"""ResNet with group norm instead of batch norm.

A sample's features do not depend on the other samples of its batch, so two processes compute what one would, up to
rounding. Importing this module registers the model with transformers: AutoModel then loads a saved folder.
"""

from torch import nn
from transformers import AutoConfig, AutoModel, ResNetConfig, ResNetModel


class GroupNormResNetConfig(ResNetConfig):
    """ResNetConfig with the number of `groups`, which must divide all widths."""

    model_type = "nuclr_group_norm_resnet"
    groups: int = 8


class GroupNormResNet(ResNetModel):
    """The ResNet of transformers with every batch norm replaced by a group norm."""

    config_class = GroupNormResNetConfig

    def __init__(self, config: GroupNormResNetConfig) -> None:
        super().__init__(config)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(config.groups, child.num_features))


AutoConfig.register(GroupNormResNetConfig.model_type, GroupNormResNetConfig)
AutoModel.register(GroupNormResNetConfig, GroupNormResNet)
