"""How unsure an ensemble is, how to calibrate it, and when to abstain."""

from .abstaining import Abstention as Abstention
from .abstaining import fit_abstention as fit_abstention
from .calibration import CalibrationWarning as CalibrationWarning
from .calibration import TemperatureFit as TemperatureFit
from .calibration import find_temperature as find_temperature
from .calibration import fit_member_temperatures as fit_member_temperatures
from .calibration import fit_temperature as fit_temperature
from .prediction import Prediction as Prediction
from .prediction import predict_from_logits as predict_from_logits
from .scores import Score as Score
from .scores import as_member_logits as as_member_logits
from .scores import disagreement as disagreement
from .scores import energy as energy
from .scores import entropy as entropy
from .scores import entropy_of as entropy_of
from .scores import log_mean_probability as log_mean_probability
from .scores import max_logit as max_logit
from .scores import mcm as mcm
from .scores import mean_probability as mean_probability
from .scores import member_probabilities as member_probabilities
from .scores import msp as msp
from .scores import mutual_information as mutual_information
from .scores import pairwise_kl as pairwise_kl
from .scores import scale_logits as scale_logits
from .scores import score_logits as score_logits
from .scores import scores as scores
