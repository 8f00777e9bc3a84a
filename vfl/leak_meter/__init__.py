"""The leak meter: measures by attacks what a run's exchanges give away. Nothing else imports this
package.
"""
