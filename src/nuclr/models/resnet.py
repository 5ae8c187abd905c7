"""ResNet with group norm: no sample depends on the others of its batch, so two processes equal one to the last digits.

Registered with transformers: a saved folder loads through AutoModel wherever this module has been imported.
"""

from torch import nn
from transformers import AutoConfig, AutoModel, ResNetConfig, ResNetModel


class GroupNormResNetConfig(ResNetConfig):
    """ResNetConfig and `groups`, which divides all its widths."""

    model_type = "nuclr_group_norm_resnet"
    groups: int = 8


class GroupNormResNet(ResNetModel):
    """transformers' ResNet, each batch norm replaced by a group norm."""

    config_class = GroupNormResNetConfig

    def __init__(self, config: GroupNormResNetConfig) -> None:
        super().__init__(config)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(config.groups, child.num_features))


AutoConfig.register(GroupNormResNetConfig.model_type, GroupNormResNetConfig)
AutoModel.register(GroupNormResNetConfig, GroupNormResNet)
